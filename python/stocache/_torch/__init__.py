"""What stocache must know of torch beyond its public interface."""
