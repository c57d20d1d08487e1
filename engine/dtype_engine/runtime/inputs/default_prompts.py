"""The default prompts: prose, code, numbers and dialogue, so that a model processes several kinds of text. The prompt with the
question is a fifth as long as the others. It runs first, so that the first result appears early.
"""

DEFAULT_PROMPTS: tuple[str, ...] = (
    '''import os
import sys
from collections import OrderedDict


class Cache:
    """A mapping that forgets its oldest entry when it is full."""

    def __init__(self, size=128):
        self.size = size
        self._entries = OrderedDict()

    def get(self, key, default=None):
        if key not in self._entries:
            return default
        self._entries.move_to_end(key)
        return self._entries[key]
''',
    '''def read_lines(path, encoding="utf-8"):
    """Return the lines of a file as a list, without their line ends."""
    with open(path, encoding=encoding) as file:
        return [line.rstrip("\\n") for line in file]


def main(argv=None):
    if argv is None:
        argv = sys.argv[1:]
    for path in argv:
        try:
            lines = read_lines(path)
        except OSError as error:
            print("cannot read", path, error, file=sys.stderr)
            return 1
''',
    "The river had risen in the night, and by morning the lower field was a sheet of brown water. Nobody in the village "
    "could remember a spring like it. Anna stood at the gate with her boots in her hand and counted the fence posts that "
    "were still to be seen: eleven, where there had been forty. Her brother wanted to take the boat out at once, but the "
    "current along the hedge was stronger than it looked, and they waited until noon.",
    "A floating-point number has a sign, an exponent and a fraction. When the exponent has fewer bits, large values overflow "
    "to infinity and small ones vanish to zero; when the fraction has fewer bits, neighbouring values become the same. "
    "Which of the two matters more depends on the numbers that a model really uses, and that can only be measured.",
    "Question: How many minutes are three hours?\nAnswer: 180.",
    '''class Node(object):
    """One node of a tree. Children are kept in the order in which they were added."""

    def __init__(self, name, parent=None):
        self.name = name
        self.parent = parent
        self.children = []

    def add(self, child):
        """Add a child node and return it."""
        if not isinstance(child, Node):
            raise TypeError("expected a Node, got %r" % type(child))
        child.parent = self
        self.children.append(child)
        return child

    def __repr__(self):
        return "<%s %r>" % (self.__class__.__name__, self.name)
''',
)
