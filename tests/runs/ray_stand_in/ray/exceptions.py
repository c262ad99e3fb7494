"""The errors of the stand-in."""


class RayError(Exception):
    """The base of Ray's errors."""


class RayActorError(RayError):
    """The process of an actor is gone."""
