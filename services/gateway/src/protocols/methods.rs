//! The methods of the gRPC services, by path.

use std::collections::HashMap;

use construct_proto::DESCRIPTORS;
use prost_reflect::{
    DescriptorPool, MethodDescriptor, prost_types::method_options::IdempotencyLevel,
};
use tonic::codegen::http::uri::PathAndQuery;

/// All methods.
pub(super) struct Methods {
    by_path: HashMap<String, Method>,
    pool: DescriptorPool,
}

/// One method.
#[derive(Debug, Clone)]
pub(super) struct Method {
    pub(super) descriptor: MethodDescriptor,
    /// `/package.Service/Method`.
    pub(super) path: PathAndQuery,
    /// Whether it changes nothing, and so can be called with GET.
    pub(super) is_read_only: bool,
}

impl Methods {
    pub(super) fn new() -> anyhow::Result<Self> {
        let mut pool = DESCRIPTORS.clone();
        pool.decode_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)?;
        pool.decode_file_descriptor_set(tonic_reflection::pb::v1::FILE_DESCRIPTOR_SET)?;
        pool.decode_file_descriptor_set(tonic_reflection::pb::v1alpha::FILE_DESCRIPTOR_SET)?;
        pool.decode_file_descriptor_set(tonic_types::pb::FILE_DESCRIPTOR_SET)?;
        let mut by_path = HashMap::new();
        for descriptor in pool.services().flat_map(|service| service.methods().collect::<Vec<_>>())
        {
            let path =
                format!("/{}/{}", descriptor.parent_service().full_name(), descriptor.name());
            let options = descriptor.method_descriptor_proto().options.as_ref();
            let is_read_only = options.is_some_and(|options| {
                options.idempotency_level() == IdempotencyLevel::NoSideEffects
            });
            let streams = descriptor.is_client_streaming() || descriptor.is_server_streaming();
            let method =
                Method { descriptor, path: path.parse()?, is_read_only: is_read_only && !streams };
            by_path.insert(path, method);
        }
        Ok(Self { by_path, pool })
    }

    pub(super) fn get(&self, path: &str) -> Option<&Method> {
        self.by_path.get(path)
    }

    /// All types, including those of error details.
    pub(super) fn pool(&self) -> &DescriptorPool {
        &self.pool
    }
}

impl Method {
    pub(super) fn streams(&self) -> bool {
        self.descriptor.is_client_streaming() || self.descriptor.is_server_streaming()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_read_methods_are_marked_as_read_only() {
        let methods = Methods::new().expect("the descriptors fit together");
        let ours = methods
            .by_path
            .values()
            .filter(|method| method.descriptor.full_name().starts_with("construct.v1."));
        let mut count = 0;
        for method in ours {
            let name = method.descriptor.name();
            let is_read_only = name == "WhoAmI"
                || ["Get", "List", "Explain", "Compare", "Diagnose"]
                    .iter()
                    .any(|verb| name.starts_with(verb));
            assert_eq!(method.is_read_only, is_read_only, "{}", method.descriptor.full_name());
            count += 1;
        }
        assert!(count > 40, "{count}");
    }
}
