"""The app's state and behavior, independent of widgets."""
