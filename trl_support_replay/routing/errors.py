"""Errors of router replay."""


class RouterReplayError(RuntimeError):
    """Routes and router calls do not fit together, or a scope was used out of order."""


class UnreplayableRouterError(ValueError):
    """A model whose routing cannot be replayed exactly.

    Attributes:
        model_type: the family's name, as its configuration gives it.
    """

    def __init__(self, model_type: str, reason: str):
        super().__init__(f"The routing of a {model_type!r} model cannot be replayed: {reason}.")
        self.model_type = model_type
