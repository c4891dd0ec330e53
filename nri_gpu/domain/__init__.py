"""Values that all packages share: frozen msgspec Structs without behaviour of their own."""
