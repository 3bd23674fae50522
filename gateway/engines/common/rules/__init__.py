"""What the rules of every engine version are made of: conditions, and the subject that they are
asked of."""
