"""`make demo`: the story that Perdure promises, run on a real stack and a real model, and asserted."""
