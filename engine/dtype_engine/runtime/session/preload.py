"""Imports the modules that every evaluation needs. The fork server of a process pool imports this module before it forks, so that
the forked processes have them already.
"""

from dtype_engine.runtime.session.opening import import_loaders

import_loaders()
