"""The model that trains: its forward with support scores, and the tests that a model has to pass before."""
