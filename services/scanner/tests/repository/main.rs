//! Repository sources and archives, against real HTTP servers and real repositories.

mod archives;
mod github;
mod gitlab;
mod packages;
