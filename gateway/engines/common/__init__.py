"""Parts that engine kinds share: the contract of their rules, and models of layers, memory and
speed."""
