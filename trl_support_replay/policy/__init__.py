"""The model that trains: its forward with support scores, and the tests that make it fit for replay."""
