"""Vocabulary that every room shares: dtypes, the module tree, options, errors, text, files."""
