"""The libraries underneath: supported versions, the methods this package relies on, and names replaced for a while."""
