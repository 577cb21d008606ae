"""What runs inside a vLLM server: the packed endpoint, generation with supports, and reloading of weights."""
