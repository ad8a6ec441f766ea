import js from "@eslint/js";
import hooks from "eslint-plugin-react-hooks";
import tseslint from "typescript-eslint";

export default tseslint.config({ ignores: ["node_modules"] }, js.configs.recommended, ...tseslint.configs.strict, {
  plugins: { "react-hooks": hooks },
  rules: {
    "react-hooks/rules-of-hooks": "error",
    "react-hooks/exhaustive-deps": "error",
    // Records and settings come from others: nothing of theirs may become markup.
    "no-restricted-syntax": [
      "error",
      { selector: "JSXAttribute[name.name='dangerouslySetInnerHTML']", message: "Text is text." },
      { selector: "AssignmentExpression[left.property.name='innerHTML']", message: "Text is text." },
    ],
  },
});
