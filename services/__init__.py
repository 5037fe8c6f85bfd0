"""The five services, each an actor in a process of its own; none imports another."""
