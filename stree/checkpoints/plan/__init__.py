"""Plan how a checkpoint's weights are loaded, without PyTorch, and then load them."""
