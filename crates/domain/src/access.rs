//! What callers may do: the roles of members, and the scopes of keys. A method names one of each
//! (the gateway's table of rules).

macro_rules! words {
    ($(#[$doc:meta])* $name:ident { $($(#[$variant_doc:meta])* $variant:ident = $word:literal,)* }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum $name {
            $($(#[$variant_doc])* $variant,)*
        }

        impl $name {
            /// All of them, in order.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)*];

            /// As it is written and stored.
            pub const fn as_str(self) -> &'static str {
                match self {
                    $(Self::$variant => $word,)*
                }
            }

            /// The reverse of [`Self::as_str`].
            pub fn parse(text: &str) -> Option<Self> {
                Self::ALL.iter().copied().find(|known| known.as_str() == text)
            }
        }
    };
}

words! {
    /// What a member is in an organization. Each may what those before it may.
    Role {
        /// Sees everything but changes nothing.
        Viewer = "viewer",
        /// Works: agents, tasks, messages, approvals, schedules.
        Member = "member",
        /// Looks after the organization: models, secrets, budgets, members, keys.
        Admin = "admin",
        /// It is theirs: they make others owners, and delete it.
        Owner = "owner",
    }
}

words! {
    /// What a key is good for. Writing includes reading.
    Scope {
        /// Everything that the role allows.
        Admin = "admin",
        /// To see agents.
        AgentsRead = "agents:read",
        /// To change agents.
        AgentsWrite = "agents:write",
        /// To see budgets and costs.
        BudgetsRead = "budgets:read",
        /// To change budgets.
        BudgetsWrite = "budgets:write",
        /// To read files.
        FilesRead = "files:read",
        /// To upload, rename and delete files.
        FilesWrite = "files:write",
        /// To call tools through MCP.
        McpExecute = "mcp:execute",
        /// To see tools through MCP.
        McpRead = "mcp:read",
        /// To see models and providers.
        ModelsRead = "models:read",
        /// To change models and providers, and to make tokens for models.
        ModelsWrite = "models:write",
        /// To see what secrets there are.
        SecretsRead = "secrets:read",
        /// To change secrets.
        SecretsWrite = "secrets:write",
        /// To read documents that clients keep: the user's own, and the organization's.
        StatesRead = "states:read",
        /// To write them, as far as the role goes.
        StatesWrite = "states:write",
        /// To see tasks, messages, approvals, schedules and events.
        TasksRead = "tasks:read",
        /// To begin and steer tasks, and to decide approvals.
        TasksWrite = "tasks:write",
    }
}

impl Scope {
    /// Whether who holds these scopes may do what needs this one.
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
    fn words_read_back_and_roles_have_an_order() {
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
    fn writing_includes_reading_and_admin_everything_but_nothing_else_does() {
        assert!(Scope::TasksRead.is_within(&[Scope::TasksWrite]));
        assert!(!Scope::TasksWrite.is_within(&[Scope::TasksRead]));
        assert!(!Scope::Admin.is_within(&Scope::ALL[1..]));
        for scope in Scope::ALL {
            assert!(scope.is_within(&[Scope::Admin]));
            assert!(!scope.is_within(&[]));
        }
    }
}
