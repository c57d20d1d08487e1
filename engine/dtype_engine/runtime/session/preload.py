"""Imports the modules that every evaluation needs. A process pool's fork server imports this one once, before it forks."""

from dtype_engine.runtime.session.opening import import_loaders

import_loaders()
