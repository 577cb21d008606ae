"""The libraries underneath: supported versions, methods this package relies on, and names replaced for a block."""
