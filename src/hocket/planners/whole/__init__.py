"""The whole question: how are the samples of one step shared between devices and in time."""
