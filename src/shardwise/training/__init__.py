"""`fit` and what it uses while a run trains."""
