"""`fitserve doctor`: what the gateway needs of this machine, read (`readings`), judged (`checks`),
and mended where that does no harm (`fixes`)."""
