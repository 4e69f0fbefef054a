"""What a radix cache should do, written again: nodes with real tokens, children, a clock and a search.

From the rules of SGLang's RadixCache alone: no chain ids, no pages, no list of unlocked nodes. A key
is a namespace's number and the tokens; times are drawn wherever SGLang reads its clock.
"""

from __future__ import annotations

Tokens = tuple[int, ...]


class Node:
    def __init__(self, parent: Node | None, tokens: Tokens, time: int) -> None:
        self.parent = parent
        self.tokens = tokens
        self.children: list[Node] = []
        self.locks = 0
        self.time = time


class ModelTree:
    """One tree for each namespace: keys of different ones share nothing."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.time = 0
        self.roots: dict[int, Node] = {}

    def now(self) -> int:
        self.time += 1
        return self.time

    def nodes(self) -> list[Node]:
        found = list(self.roots.values())
        for node in found:
            found += node.children
        return [node for node in found if node.parent is not None]

    def agree(self, a: Tokens, b: Tokens) -> int:
        """How many leading tokens are equal, in whole pages."""
        n = 0
        while n < min(len(a), len(b)) and a[n : n + self.page_size] == b[n : n + self.page_size]:
            n += self.page_size
        return n

    def descend(self, namespace: int, tokens: Tokens) -> tuple[Node, int]:
        """Walk and touch; split where the walk ends inside a node. Returns where it ends, and how deep."""
        node = self.roots.setdefault(namespace, Node(None, (), 0))
        touched = self.now()
        depth = 0
        while True:
            child = next((c for c in node.children if self.agree(c.tokens, tokens[depth:])), None)
            if child is None:
                return node, depth
            child.time = touched
            n = self.agree(child.tokens, tokens[depth:])
            depth += n
            if n < len(child.tokens):
                upper = Node(node, child.tokens[:n], self.now())
                upper.locks, upper.children = child.locks, [child]
                node.children[node.children.index(child)] = upper
                child.parent, child.tokens = upper, child.tokens[n:]
                return upper, depth
            node = child

    def match(self, namespace: int, tokens: Tokens) -> tuple[Node, int]:
        whole = len(tokens) // self.page_size * self.page_size
        return self.descend(namespace, tokens[:whole])

    def insert(self, namespace: int, tokens: Tokens) -> int:
        """Tokens of whole pages; returns how many were there."""
        node, depth = self.descend(namespace, tokens)
        if depth < len(tokens):
            node.children.append(Node(node, tokens[depth:], self.now()))
        return depth

    def lock(self, node: Node, by: int) -> None:
        walk: Node | None = node
        while walk is not None and walk.parent is not None:
            walk.locks += by
            assert walk.locks >= 0
            walk = walk.parent

    def evict(self, num_tokens: int) -> list[tuple[int, Tokens]]:
        """Evict leaves, each whole, least recently used first; returns the paths that went."""
        gone: list[tuple[int, Tokens]] = []
        while num_tokens > 0:
            leaves = [node for node in self.nodes() if not node.children and not node.locks]
            if not leaves:
                break
            leaf = min(leaves, key=lambda node: node.time)
            gone.append(self.path(leaf))
            num_tokens -= len(leaf.tokens)
            assert leaf.parent is not None
            leaf.parent.children.remove(leaf)
        return gone

    def path(self, node: Node) -> tuple[int, Tokens]:
        """A node's namespace and all tokens down to its end."""
        tokens = node.tokens
        while node.parent is not None:
            node = node.parent
            tokens = node.tokens + tokens
        return next(n for n, root in self.roots.items() if root is node), tokens

    def size(self, locked: bool) -> int:
        return sum(len(node.tokens) for node in self.nodes() if (node.locks > 0) == locked)
