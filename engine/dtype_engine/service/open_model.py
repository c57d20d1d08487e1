"""The opened model, or what can be opened of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from dtype_engine.core.errors import UserError

if TYPE_CHECKING:
    from dtype_engine.checkpoint import Checkpoint
    from dtype_engine.checkpoint.source import Source
    from dtype_engine.core.options import Options
    from dtype_engine.core.tree import Tree
    from dtype_engine.runtime.session.session import Session

Available = Literal["opening", "model", "files", "nothing"]
"""What commands can use: "opening" (not known yet), "model" (a live model), "files" (only those of a checkpoint), "nothing"."""


@dataclass
class OpenModel:
    """A model: loaded into memory (`session`), with only its headers read (`checkpoint`), or neither."""

    source: Source
    options: Options
    checkpoint: Checkpoint | None = None
    session: Session | None = None
    known_tree: Tree | None = None
    """The tree with module classes, if the architecture is known but the model could not be loaded."""
    why_closed: str = ""
    """Why the model could not be loaded, or ""."""
    opens_next: tuple[Source, Options] | None = None
    """The model to open in place of this one: the whole model after a download, or the same model with other options."""

    @property
    def available(self) -> Available:
        return "model" if self.session is not None else "files" if self.checkpoint is not None else "nothing"

    @property
    def provenance(self) -> tuple[str, ...]:
        """Lines that say how the checkpoint was quantized, such as "not quantized: lm_head"."""
        return self.checkpoint.provenance.lines() if self.checkpoint is not None else ()

    def tree(self) -> Tree:
        """Return the most complete known tree. Raises UserError if nothing is open."""
        if self.session is not None:
            return self.session.tree
        if self.checkpoint is None:
            raise UserError("the model is not open")
        return self.known_tree if self.known_tree is not None else self.checkpoint.tree()
