//! End-to-end tests of the mesh on real PostgreSQL and NATS.

pub mod client;
pub mod clocks;
pub mod collector;
pub mod disk;
pub mod github;
pub mod gitlab;
pub mod http;
pub mod mesh;
pub mod postgres;
pub mod proxy;
pub mod random;
pub mod recorder;
pub mod repositories;
pub mod slack;
pub mod terminal;
pub mod transcript;
pub mod vendor;
pub mod wait;
