"""Gates that a variant passes before its sizes. The first that refuses decides the verdict."""
