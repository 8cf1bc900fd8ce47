"""One page that shows everything: runs and prediction files → what they gave → ``index.html``."""
