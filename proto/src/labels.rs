//! Enums whose variants have a label each: the values of a metric's label, of a flag or in a page.

/// Declares such an enum, with `ALL` variants and the `label` of each.
#[macro_export]
macro_rules! label_enum {
    ($(#[$meta:meta])* $vis:vis enum $name:ident {
        $($(#[$variant_meta:meta])* $variant:ident = $label:literal,)*
    }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        $vis enum $name {
            $($(#[$variant_meta])* $variant,)*
        }

        impl $name {
            #[allow(dead_code, reason = "some sets are never listed")]
            $vis const ALL: [Self; [$($label),*].len()] = [$(Self::$variant),*];

            #[must_use]
            $vis const fn label(self) -> &'static str {
                match self {
                    $(Self::$variant => $label,)*
                }
            }
        }
    };
}
