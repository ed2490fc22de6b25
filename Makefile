setup:
	@true
