"""The columns of the core's tables, each table's in a module named by one letter.

Modules, not enumerations or tuples of numbers: numba sees a module's attribute as a constant, where
it would build a tuple anew, all of it, at each look.
"""

from sim.columns import blocks as B
from sim.columns import chains as C
from sim.columns import clock as W
from sim.columns import count as K
from sim.columns import history as H
from sim.columns import nodes as N
from sim.columns import queues as Q
from sim.columns import radix as E
from sim.columns import requests as R
from sim.columns import samples as X
from sim.columns import steps as S
from sim.columns import times as T

__all__ = ["B", "C", "E", "H", "K", "N", "Q", "R", "S", "T", "W", "X"]
