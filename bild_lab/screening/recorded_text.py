"""What a model scored after one prompt: a tree of tokens, each with its rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from bild_lab.engine.draft import Tree, common_prefix
from bild_lab.engine.sampling import most_likely, precise
from bild_lab.engine.session import OutputSpec, Rows, Scores, Session
from bild_lab.screening.record_store import RecordedRow, RowValues

LOGITS, HEAD_INPUT = "logits", "head_input"
STATE = "state before the head of "  # and a kind of scores, which the head makes of it
HEAD_ROWS = 32  # how many rows the head scores at once
WHOLE, PART = "whole", "part"  # forwards through all layers, and through some


def on_cpu(tensor: Tensor) -> Tensor:
    """A copy in the CPU's memory."""
    return tensor.to("cpu", copy=True)


class RecordedNode:
    """A token after its parent. rows: by kind, what the model returned at this token, or the state
    that gives it.
    """

    __slots__ = ("_choice", "children", "number", "parent", "rows", "token")

    def __init__(self, parent: RecordedNode | None, token: int, number: int) -> None:
        self.parent, self.token, self.number = parent, token, number
        self.children: dict[int, RecordedNode] = {}
        self.rows: dict[str, RowValues] = {}
        self._choice: tuple[int, float] | None = None

    def has(self, kind: str) -> bool:
        """Whether this row is known, itself or by its state."""
        return kind in self.rows or STATE + kind in self.rows

    def has_short_state(self, kind: str) -> bool:
        """Whether this row has a state that is smaller than the row itself."""
        state = self.rows.get(STATE + kind)
        return state is not None and state.nbytes < self.rows[kind].nbytes

    @property
    def choice(self) -> tuple[int, float]:
        """The most likely next token, and its probability at temperature 1."""
        if self._choice is None:
            logits = precise(self.rows[LOGITS])
            self._choice = int(most_likely(logits)), float(logits.softmax(-1).amax(-1))
        return self._choice

    @property
    def context(self) -> list[int]:
        """The tokens after the prompt, this one last."""
        tokens, node = [], self
        while node.parent is not None:
            tokens.append(node.token)
            node = node.parent
        return tokens[::-1]


class RecordedText:
    """The tree of one prompt, and a session of the model for what the tree lacks.

    The root is the prompt without its last token. start: how many tokens that is. open_session:
    starts the session, at the first row that lacks. blocks: rows saved before.
    depth: of a model whose head gives a row the same bits whatever rows run beside it. Then a row
    of scores is saved as the state that the head makes it of, a hundredth of its size where a
    vocabulary is large, if the head gives all its bits again; else as it is. None: every row is
    saved as it is.
    """

    def __init__(
        self,
        start: int,
        device: torch.device,
        open_session: Callable[[], Session],
        blocks: Sequence[Sequence[RecordedRow]],
        depth: int | None = None,
    ) -> None:
        self.root = RecordedNode(None, -1, 0)
        self.nodes = [self.root]
        self.new: list[tuple[RecordedNode, str]] = []
        self.memory_bytes = 0  # of the rows in memory that `release` takes out of it
        self._depth = depth
        self.forwards: Counter[str] = Counter()  # that ran since the text was saved
        self._start, self._device, self._open = start, device, open_session
        self._session: Session | None = None
        self._fed: list[int] = []  # tokens that the session has cached after the root
        self.block_count = len(blocks)  # as many as the tree was read from, or saved to
        for block in blocks:
            for row in block:
                node = self._child(self.nodes[row.parent], row.token)
                node.rows[row.kind] = row.values

    def close(self) -> None:
        """Free the session."""
        self._session, self._fed = None, []

    def clear(self) -> None:
        """Free the session and all rows.

        Nodes refer to each other, so rows would stay until the garbage collector comes.
        """
        self.close()
        for node in self.nodes:
            node.rows.clear()

    def new_rows(self) -> list[RecordedRow]:
        """The new rows as they are saved, in their order."""
        saved_kinds = {(node, kind): kind for node, kind in self.new}
        with_states = [(node, kind) for node, kind in self.new if node.has_short_state(kind)]
        for start in range(0, len(with_states), HEAD_ROWS):
            chunk = with_states[start : start + HEAD_ROWS]
            rescored = self._scored([node.rows[STATE + kind] for node, kind in chunk])
            for (node, kind), row in zip(chunk, rescored, strict=True):
                if torch.equal(row, node.rows[kind]):
                    saved_kinds[node, kind] = STATE + kind
        return [
            RecordedRow(node.parent.number, node.token, kind, node.rows[kind])
            for (node, _), kind in saved_kinds.items()
        ]

    def release(self, kept: Sequence[RecordedRow | None]) -> None:
        """Count all rows as saved, and take them out of memory.

        A row is made of its state again when it is asked for. kept: what stays of each new row, as
        `new_rows` gives them; None: nothing, the model runs again.
        """
        for (node, kind), row in zip(self.new, kept, strict=True):
            del node.rows[kind]
            node.rows.pop(STATE + kind, None)
            if row is None:
                node._choice = None
            else:
                node.rows[row.kind] = row.values
        for node in self.nodes:
            for kind in [kind for kind in node.rows if STATE + kind in node.rows]:
                del node.rows[kind]
        self.memory_bytes, self.new = 0, []
        self.forwards.clear()

    def rows(
        self,
        trunk: RecordedNode,
        tokens: Sequence[int],
        parents: Sequence[int | RecordedNode] | None,
        head: bool,
    ) -> list[RecordedNode]:
        """The nodes of these rows, with their logits. What was not scored before runs, in one
        forward.

        trunk: what the rows follow. parents: the row before each row, as an index or as the node of
        a row that ran earlier; None: a chain. head: also the head's input.
        """
        nodes: list[RecordedNode | None] = []
        missing: list[int] = []
        kinds = (LOGITS, HEAD_INPUT) if head else (LOGITS,)
        parent: RecordedNode | None = trunk
        for place, token in enumerate(tokens):
            if parents is not None:
                parent = parents[place]
                if isinstance(parent, int):
                    parent = nodes[parent]
            node = None if parent is None else parent.children.get(token)
            if node is not None and not all(map(node.has, kinds)):
                node = None
            if node is None:
                missing.append(place)
            nodes.append(node)
            parent = node
        if not missing:
            self._score(nodes, LOGITS)
            return nodes
        if parents is None:
            first_missing = missing[0]
            self._run(
                nodes[first_missing - 1] if first_missing else trunk,
                tokens[first_missing:],
                None,
                head,
            )
        else:
            self._run_branches(trunk, tokens, parents, nodes, missing, head)
        return self.rows(trunk, tokens, parents, head)

    def drafted(
        self,
        trunk: RecordedNode,
        tokens: Sequence[int],
        output_spec: OutputSpec,
        kinds: Sequence[str],
    ) -> list[RecordedNode]:
        """The nodes of a chain of drafted rows, which run through a part of the model after the
        text.

        output_spec: with its layers, and the blocks skipped. kinds: under which each row is kept.
        """
        nodes, node = [], trunk
        for token, kind in zip(tokens, kinds, strict=True):
            node = node.children.get(token)
            if node is None or not node.has(kind):
                self._run_drafted(trunk, tokens, output_spec, kinds)
                return self.drafted(trunk, tokens, output_spec, kinds)
            self._score([node], kind)
            nodes.append(node)
        return nodes

    def _run_branches(
        self,
        trunk: RecordedNode,
        tokens: Sequence[int],
        parents: Sequence[int | RecordedNode],
        nodes: Sequence[RecordedNode | None],
        missing: Sequence[int],
        head: bool,
    ) -> None:
        """Run the missing rows of a tree, and those between them and the text."""
        fed: list[int] = []
        fed_parents: list[int] = []
        row_of: dict[RecordedNode | int, int] = {trunk: -1}

        def feed(key: RecordedNode | int, token: int, parent_row: int) -> None:
            row_of[key] = len(fed)
            fed.append(token)
            fed_parents.append(parent_row)

        def ensure(node: RecordedNode) -> int:
            if node not in row_of:
                feed(node, node.token, ensure(node.parent))
            return row_of[node]

        for place in missing:
            parent = parents[place]
            if isinstance(parent, int) and nodes[parent] is not None:
                parent = nodes[parent]
            parent_row = row_of[parent] if isinstance(parent, int) else ensure(parent)
            feed(place, tokens[place], parent_row)
        self._run(trunk, fed, fed_parents, head)

    def _run(
        self, trunk: RecordedNode, tokens: Sequence[int], parents: Sequence[int] | None, head: bool
    ) -> None:
        """Run rows after a node and keep what came out. parents: indices, -1 for the trunk; None: a
        chain.
        """
        context = trunk.context
        lacking = self._reach(context)
        rows = Rows([*lacking, *tokens])
        if parents is not None:
            count = len(lacking)
            shifted = [*range(-1, count - 1), *(parent + count for parent in parents)]
            rows = Rows(rows.tokens, Tree(torch.tensor(shifted, device=self._device)))
        hidden = () if self._depth is None else (self._depth,)
        scores = self._session.extend(
            rows, OutputSpec(logits=len(tokens), head_input=head, hidden=hidden)
        )
        self.forwards[WHOLE] += 1
        outputs = {LOGITS: scores.logits}
        if head:
            outputs[HEAD_INPUT] = scores.head_input[-len(tokens) :]
        states = self._states_of(scores, len(tokens))
        nodes: list[RecordedNode] = []
        for place, token in enumerate(tokens):
            parent = place - 1 if parents is None else parents[place]
            nodes.append(self._child(trunk if parent < 0 else nodes[parent], token))
            for kind, output in outputs.items():
                self._keep(nodes[-1], kind, output, states if kind == LOGITS else None, place)
        if parents is None:
            self._fed = [*context, *tokens]
        else:
            self._session.rollback(self._start + len(context))
            self._fed = context

    def _run_drafted(
        self,
        trunk: RecordedNode,
        tokens: Sequence[int],
        output_spec: OutputSpec,
        kinds: Sequence[str],
    ) -> None:
        context = trunk.context
        if lacking := self._reach(context):
            self._session.extend(lacking, OutputSpec(logits=1))
            self.forwards[WHOLE] += 1
            self._fed = context
        rows = Rows(tokens, position=self._start + len(context))
        hidden = () if self._depth is None else (output_spec.layers[-1] + 1,)
        scores = self._session.extend(rows, replace(output_spec, hidden=hidden))
        states = self._states_of(scores, len(tokens))
        self.forwards[PART] += 1
        node = trunk
        for place, (token, kind) in enumerate(zip(tokens, kinds, strict=True)):
            node = self._child(node, token)
            self._keep(node, kind, scores.logits, states, place)

    def _reach(self, context: list[int]) -> list[int]:
        """Roll the session back to what it shares with this text.

        Returns the tokens that it still lacks.
        """
        session = self._opened()
        shared_length = common_prefix(self._fed, context)
        session.rollback(self._start + shared_length)
        self._fed = self._fed[:shared_length]
        return context[shared_length:]

    def _opened(self) -> Session:
        if self._session is None:
            self._session, self._fed = self._open(), []
        return self._session

    def _keep(
        self, node: RecordedNode, kind: str, rows: Tensor, states: Tensor | None, place: int
    ) -> None:
        """Keep one of these rows, with its state if the model gives one."""
        if not node.has(kind):
            node.rows[kind] = on_cpu(rows[place : place + 1])
            self.memory_bytes += node.rows[kind].nbytes
            if states is not None:
                node.rows[STATE + kind] = states[place : place + 1]
            self.new.append((node, kind))

    def _states_of(self, scores: Scores, count: int) -> Tensor | None:
        """The states of the last rows, if the model gives them."""
        return on_cpu(scores.hidden[0][-count:]) if scores.hidden else None

    def _score(self, nodes: Sequence[RecordedNode], kind: str) -> None:
        """Have the head score these nodes where a state alone was saved, and the nodes recorded
        after them.
        """
        lacking = [node for node in dict.fromkeys(nodes) if kind not in node.rows]
        while lacking:
            chunk, lacking = lacking[:HEAD_ROWS], lacking[HEAD_ROWS:]
            for node in self.nodes[chunk[-1].number + 1 :][: HEAD_ROWS - len(chunk)]:
                if node not in chunk and kind not in node.rows and node.has(kind):
                    chunk.append(node)
            rows = self._scored([node.rows[STATE + kind] for node in chunk])
            for node, row in zip(chunk, rows, strict=True):
                node.rows[kind] = row
                self.memory_bytes += row.nbytes

    def _scored(self, states: Sequence[RowValues]) -> Sequence[RowValues]:
        """The head's scores of these states."""
        rows = Rows([0] * len(states), states=torch.cat(list(states)).to(self._device))
        scores = self._opened().extend(rows, OutputSpec(layers=()))
        return on_cpu(scores.logits).split(1)

    def _child(self, parent: RecordedNode, token: int) -> RecordedNode:
        node = parent.children.get(token)
        if node is None:
            node = parent.children[token] = RecordedNode(parent, token, len(self.nodes))
            self.nodes.append(node)
        return node
