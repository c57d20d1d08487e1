"""Imports what every evaluation needs. The fork server of a process pool imports this module once, before it forks processes."""

from dtype_engine.runtime.session.opening import import_loaders

import_loaders()
