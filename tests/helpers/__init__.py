"""Code that several folders of tests share."""
