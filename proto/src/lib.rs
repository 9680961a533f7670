//! Construct's contracts, generated from the `.proto` files beside this crate. No logic.
//!
//! [`v1`] is the public API, [`mesh`] what the services say to each other over NATS.

use std::sync::LazyLock;

use prost_reflect::DescriptorPool;

/// The public API, package `construct.v1`.
pub mod v1 {
    tonic::include_proto!("construct.v1");

    /// Without the credential.
    impl std::fmt::Debug for ScanConnectionSpec {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.debug_struct("ScanConnectionSpec")
                .field("name", &self.name)
                .field("host", &self.host)
                .field("base_url", &self.base_url)
                .finish_non_exhaustive()
        }
    }

    /// Only which kind it is.
    impl std::fmt::Debug for scan_connection_spec::Credential {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str(match self {
                Self::Token(_) => "Token",
                Self::App(_) => "App",
            })
        }
    }

    /// Without the private key.
    impl std::fmt::Debug for GitHubApp {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            let Self { app_id, installation_id, private_key: _ } = self;
            f.debug_struct("GitHubApp")
                .field("app_id", app_id)
                .field("installation_id", installation_id)
                .finish_non_exhaustive()
        }
    }

    /// Without the archive, which may hold somebody's secrets.
    impl std::fmt::Debug for ScanUpload {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.debug_struct("ScanUpload")
                .field("name", &self.name)
                .field("bytes", &self.archive.len())
                .finish()
        }
    }

    /// Without what the file says.
    impl std::fmt::Debug for UploadPartRequest {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.debug_struct("UploadPartRequest")
                .field("file", &self.file)
                .field("offset", &self.offset)
                .field("bytes", &self.data.len())
                .finish()
        }
    }

    /// Without what the file says.
    impl std::fmt::Debug for DownloadFileResponse {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.debug_struct("DownloadFileResponse")
                .field("offset", &self.offset)
                .field("bytes", &self.data.len())
                .finish()
        }
    }

    /// Without the value.
    impl std::fmt::Debug for SecretSpec {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            let Self { name, description, value: _, bindings } = self;
            let mut shown = f.debug_struct("SecretSpec");
            shown
                .field("name", name)
                .field("description", description)
                .field("bindings", bindings)
                .finish_non_exhaustive()
        }
    }

    /// Without the value.
    impl std::fmt::Debug for UpdateSecretRequest {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            let Self { secret, name, description, value: _, bindings, revision, idempotency_key } =
                self;
            f.debug_struct("UpdateSecretRequest")
                .field("secret", secret)
                .field("name", name)
                .field("description", description)
                .field("bindings", bindings)
                .field("revision", revision)
                .field("idempotency_key", idempotency_key)
                .finish_non_exhaustive()
        }
    }

    /// Without what it says, which may hold somebody's keys.
    impl std::fmt::Debug for State {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            let Self {
                id,
                name: _,
                shared,
                version: _,
                json: _,
                bytes,
                updated_by,
                updated_at,
                deleted,
            } = self;
            f.debug_struct("State")
                .field("id", id)
                .field("shared", shared)
                .field("bytes", bytes)
                .field("updated_by", updated_by)
                .field("updated_at", updated_at)
                .field("deleted", deleted)
                .finish_non_exhaustive()
        }
    }

    /// Without what the document says.
    impl std::fmt::Debug for PutStateRequest {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            let Self { state, shared, json, expected_version, idempotency_key, restore } = self;
            f.debug_struct("PutStateRequest")
                .field("state", state)
                .field("shared", shared)
                .field("bytes", &json.len())
                .field("expected_version", expected_version)
                .field("idempotency_key", idempotency_key)
                .field("restore", restore)
                .finish_non_exhaustive()
        }
    }

    /// Without the token.
    impl std::fmt::Debug for ModelToken {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.debug_struct("ModelToken")
                .field("id", &self.id)
                .field("models", &self.models)
                .finish_non_exhaustive()
        }
    }

    /// Without the key.
    impl std::fmt::Debug for CreateApiKeyResponse {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.debug_struct("CreateApiKeyResponse")
                .field("api_key", &self.api_key)
                .finish_non_exhaustive()
        }
    }

    /// Without the code.
    impl std::fmt::Debug for SetupCode {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.debug_struct("SetupCode")
                .field("expires_at", &self.expires_at)
                .finish_non_exhaustive()
        }
    }

    /// Without the code.
    impl std::fmt::Debug for ExchangeSetupCodeRequest {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.debug_struct("ExchangeSetupCodeRequest").finish_non_exhaustive()
        }
    }
}

/// The mesh.
pub mod mesh {
    /// Messages between services, package `construct.mesh.v1`.
    pub mod v1 {
        tonic::include_proto!("construct.mesh.v1");

        /// Without the token for models.
        impl std::fmt::Debug for CodeExecute {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                let Self {
                    step,
                    calls,
                    workspace,
                    agent_policy,
                    task_policy,
                    decisions,
                    compute,
                    secrets,
                    model_token: _,
                    script_models,
                    again,
                    agent_name,
                    files,
                } = self;
                f.debug_struct("CodeExecute")
                    .field("step", step)
                    .field("calls", calls)
                    .field("workspace", workspace)
                    .field("agent_policy", agent_policy)
                    .field("task_policy", task_policy)
                    .field("decisions", decisions)
                    .field("compute", compute)
                    .field("secrets", secrets)
                    .field("script_models", script_models)
                    .field("again", again)
                    .field("agent_name", agent_name)
                    .field("files", files)
                    .finish_non_exhaustive()
            }
        }
    }
}

/// Every message and service as an encoded `google.protobuf.FileDescriptorSet`, for gRPC
/// reflection.
pub const FILE_DESCRIPTOR_SET: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/descriptors.bin"));

/// The same, ready to decode a message of which only the full name is known, e.g.
/// `construct.v1.Event`.
pub static DESCRIPTORS: LazyLock<DescriptorPool> = LazyLock::new(|| {
    DescriptorPool::decode(FILE_DESCRIPTOR_SET)
        .expect("the build script wrote a valid descriptor set")
});
