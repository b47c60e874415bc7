//! The room as a whole: pipelines on images of every kind.
