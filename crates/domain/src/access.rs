//! What callers may do: the roles of members and the scopes of keys. Every method requires one of
//! each (the gateway's table of rules).

macro_rules! string_enum {
    ($(#[$doc:meta])* $name:ident { $($(#[$variant_doc:meta])* $variant:ident = $word:literal,)* }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum $name {
            $($(#[$variant_doc])* $variant,)*
        }

        impl $name {
            /// All values, in order.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)*];

            /// As written in the API and stored.
            pub const fn as_str(self) -> &'static str {
                match self {
                    $(Self::$variant => $word,)*
                }
            }

            /// The reverse of [`Self::as_str`].
            pub fn parse(text: &str) -> Option<Self> {
                Self::ALL.iter().copied().find(|value| value.as_str() == text)
            }
        }
    };
}

string_enum! {
    /// The role of a member in an organization. Each role includes those before it.
    Role {
        /// Reads everything and changes nothing.
        Viewer = "viewer",
        /// Manages agents, tasks, messages, approvals and schedules.
        Member = "member",
        /// Manages the organization: models, secrets, budgets, members, keys.
        Admin = "admin",
        /// Owns the organization: appoints owners, and can delete it.
        Owner = "owner",
    }
}

string_enum! {
    /// What a key may be used for. Writing includes reading.
    Scope {
        /// Everything that the role allows.
        Admin = "admin",
        /// Read agents.
        AgentsRead = "agents:read",
        /// Change agents.
        AgentsWrite = "agents:write",
        /// Read budgets and costs.
        BudgetsRead = "budgets:read",
        /// Change budgets.
        BudgetsWrite = "budgets:write",
        /// Read files.
        FilesRead = "files:read",
        /// Upload, rename and delete files.
        FilesWrite = "files:write",
        /// Call tools through MCP.
        McpExecute = "mcp:execute",
        /// List tools through MCP.
        McpRead = "mcp:read",
        /// Read models and providers.
        ModelsRead = "models:read",
        /// Change models and providers, and issue tokens for models.
        ModelsWrite = "models:write",
        /// List secrets.
        SecretsRead = "secrets:read",
        /// Change secrets.
        SecretsWrite = "secrets:write",
        /// Read documents that clients store: the user's own and the organization's.
        StatesRead = "states:read",
        /// Write those documents, as far as the role allows.
        StatesWrite = "states:write",
        /// Read tasks, messages, approvals, schedules and events.
        TasksRead = "tasks:read",
        /// Create and control tasks, and decide approvals.
        TasksWrite = "tasks:write",
    }
}

impl Scope {
    /// Whether a key with the scopes `held` may do what requires this scope.
    pub fn is_within(self, held: &[Self]) -> bool {
        let writes = match self {
            Self::AgentsRead => Self::AgentsWrite,
            Self::BudgetsRead => Self::BudgetsWrite,
            Self::FilesRead => Self::FilesWrite,
            Self::McpRead => Self::McpExecute,
            Self::ModelsRead => Self::ModelsWrite,
            Self::SecretsRead => Self::SecretsWrite,
            Self::StatesRead => Self::StatesWrite,
            Self::TasksRead => Self::TasksWrite,
            other => other,
        };
        [self, writes, Self::Admin].iter().any(|scope| held.contains(scope))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_parse_back_and_roles_are_ordered() {
        for role in Role::ALL {
            assert_eq!(Role::parse(role.as_str()), Some(*role));
        }
        for scope in Scope::ALL {
            assert_eq!(Scope::parse(scope.as_str()), Some(*scope));
        }
        assert!(
            Role::Viewer < Role::Member && Role::Member < Role::Admin && Role::Admin < Role::Owner
        );
        assert_eq!((Role::parse("root"), Scope::parse("tasks")), (None, None));
    }

    #[test]
    fn write_scope_includes_read_and_admin_includes_all() {
        assert!(Scope::TasksRead.is_within(&[Scope::TasksWrite]));
        assert!(!Scope::TasksWrite.is_within(&[Scope::TasksRead]));
        assert!(!Scope::Admin.is_within(&Scope::ALL[1..]));
        for scope in Scope::ALL {
            assert!(scope.is_within(&[Scope::Admin]));
            assert!(!scope.is_within(&[]));
        }
    }
}
