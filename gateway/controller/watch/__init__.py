"""What the gateway sees of engines: what they log, what they answer when they are asked, and what
both prove."""
