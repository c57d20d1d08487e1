"""The worker is the engine that the app controls: one thread owns the model, runs the commands of the app, and emits the results as
events.
"""
