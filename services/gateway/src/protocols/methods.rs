//! The methods of the gRPC services, as the protocols find them.

use std::collections::HashMap;

use construct_proto::DESCRIPTORS;
use prost_reflect::{
    DescriptorPool, MethodDescriptor, prost_types::method_options::IdempotencyLevel,
};
use tonic::codegen::http::uri::PathAndQuery;

/// What can be called.
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
    /// It changes nothing, and so can be called with GET.
    pub(super) reads: bool,
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
            let reads = options.is_some_and(|options| {
                options.idempotency_level() == IdempotencyLevel::NoSideEffects
            });
            let streams = descriptor.is_client_streaming() || descriptor.is_server_streaming();
            let method = Method { descriptor, path: path.parse()?, reads: reads && !streams };
            by_path.insert(path, method);
        }
        Ok(Self { by_path, pool })
    }

    pub(super) fn get(&self, path: &str) -> Option<&Method> {
        self.by_path.get(path)
    }

    /// Every type that is known, those of error details included.
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
    fn what_only_reads_says_so_in_the_contract_and_nothing_else_does() {
        let methods = Methods::new().expect("the descriptors fit together");
        let ours = methods
            .by_path
            .values()
            .filter(|method| method.descriptor.full_name().starts_with("construct.v1."));
        let mut seen = 0;
        for method in ours {
            let name = method.descriptor.name();
            let reads = name == "WhoAmI"
                || ["Get", "List", "Explain", "Compare", "Diagnose"]
                    .iter()
                    .any(|verb| name.starts_with(verb));
            assert_eq!(method.reads, reads, "{}", method.descriptor.full_name());
            seen += 1;
        }
        assert!(seen > 40, "{seen}");
    }
}
