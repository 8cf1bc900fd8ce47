"""sections of recipes that tests of systems share: an encoder of a few numbers, and a training of six steps."""

MODEL = """[model]
name = "scratch"
width = 16
heads = 2
feed_forward = 16
encoder_layers = 1
vocabulary = 400
dropout = 0.1
"""
STEPS = """[train]
max_steps = 6
batch_size = 4
accumulate = 2
learning_rate = 1e-2
warmup_steps = 2
log_every = 1
eval_every = 2
save_every = 2
keep = 9
"""
