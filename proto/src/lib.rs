//! Construct's contracts, generated from the `.proto` files beside this crate. No logic.
//!
//! [`v1`] is the public API, [`mesh`] has the messages between the services over NATS.

pub mod options;

use std::sync::LazyLock;

use prost_reflect::{DescriptorPool, MethodDescriptor, ServiceDescriptor};

/// The public API, package `construct.v1`.
pub mod v1 {
    tonic::include_proto!("construct.v1");
}

/// Google's options for the HTTP mapping.
pub mod google {
    /// The HTTP mapping of methods, package `google.api`.
    pub mod api {
        tonic::include_proto!("google.api");
    }
}

/// The mesh.
pub mod mesh {
    /// Messages between services, package `construct.mesh.v1`.
    pub mod v1 {
        tonic::include_proto!("construct.mesh.v1");
    }
}

/// A request of the public API.
pub trait ApiRequest: prost::Message {
    /// The message's full name, e.g. `construct.v1.CreateTaskRequest`.
    const NAME: &'static str;
}

/// A request with an idempotency key: repeated with the same key, it has one effect.
pub trait IdempotentRequest: ApiRequest {
    /// The key; empty if the client has set none.
    fn idempotency_key(&mut self) -> &mut String;
}

/// A request for a page of a list.
pub trait PagedRequest: ApiRequest + Clone {
    /// The requested page.
    fn page(&mut self) -> &mut Option<v1::PageRequest>;
}

include!(concat!(env!("OUT_DIR"), "/requests.rs"));

// `Debug` of messages with `debug_redact` fields, without these fields.
include!(concat!(env!("OUT_DIR"), "/debug.rs"));

/// Every message and service as an encoded `google.protobuf.FileDescriptorSet`, for gRPC
/// reflection.
pub const FILE_DESCRIPTOR_SET: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/descriptors.bin"));

/// The parsed descriptors. They decode messages by their full name, e.g. `construct.v1.Event`.
pub static DESCRIPTORS: LazyLock<DescriptorPool> = LazyLock::new(|| {
    DescriptorPool::decode(FILE_DESCRIPTOR_SET)
        .expect("the build script wrote a valid descriptor set")
});

/// The services of the public API.
pub fn services() -> impl Iterator<Item = ServiceDescriptor> {
    DESCRIPTORS.services().filter(|service| service.parent_file().package_name() == "construct.v1")
}

/// The methods of the public API.
pub fn methods() -> impl Iterator<Item = MethodDescriptor> {
    services().flat_map(|service| service.methods().collect::<Vec<_>>())
}
