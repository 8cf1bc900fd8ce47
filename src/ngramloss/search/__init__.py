"""Ids of sources → ids of outputs: searches, the engines that run them, and the writer that decodes."""
