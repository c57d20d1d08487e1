"""What every evaluation needs, imported once by the server that the processes of a pool are forked from."""

from dtype_engine.runtime.session.opening import import_loaders

import_loaders()
