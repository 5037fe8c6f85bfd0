"""The torch backend: readable, correct to a tolerance, the oracle for what follows."""
