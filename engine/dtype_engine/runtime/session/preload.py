"""Imports what every evaluation needs. The fork server of a process pool imports this module before it forks."""

from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: F401

import dtype_engine.runtime.session.opening  # noqa: F401
