"""Generation on vLLM servers: the packed endpoint beside vLLM's own, its client, and weight sync without NCCL."""
