"""The networks under the names that configs use."""

from .net import NetSettings, build_layer
from .net import TicketNet as Net

__all__ = ["Net", "NetSettings", "build_layer"]
