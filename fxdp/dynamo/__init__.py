"""Wing: the backend of `torch.compile`, which reads the graphs of Dynamo."""
