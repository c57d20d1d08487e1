"""The app's state and behaviour, independent of widgets."""
