from hypothesis import settings

# How long one example takes says nothing on a machine that does other things besides.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")
