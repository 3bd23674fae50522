"""The models of the gateway with their replicas, as the loop holds them in memory."""
