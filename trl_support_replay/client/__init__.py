"""The trainer's side of HTTP: pools of servers, transport, retries, and the folder of weights."""
