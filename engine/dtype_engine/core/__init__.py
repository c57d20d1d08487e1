"""Code that all packages of the engine share: dtypes, the module tree, options, errors, text and files."""
